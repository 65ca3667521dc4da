"""What must hold of a played contract (play.py), whatever the release: findings, not exceptions.

A finding is one sentence that says what did not hold and where. The same rules serve `make test`
for one release per era and `make test-hosts` for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator

#: Against float64 on the same quantised operands only the rounding to bf16 is left: half an ulp.
ROUNDING = 2.0**-9
#: e4m3 keeps three bits of mantissa: at most 2^-4 per activation, less in the 2-norm.
QUANTISATION = 2.0**-4
#: What the plugin answers by default; every other request is the host's.
OURS = ("auto", "triton", "flashinfer_trtllm")
VARIABLE = "SGLANG_ENABLE_FLASHINFER"
FLASHINFER = "flashinfer_gemm_w8a8_block_fp8_linear"
#: FlashInfer's two wordings and DeepGEMM's assertion, as public reports quote them.
CRASHES = (
    "does not support backend 'trtllm' with capability",
    "only supported on SM100, SM103 in trtllm",
    "Unknown recipe",
    "Unsupported architecture",
)
REMEDY = "--fp8-gemm-backend auto or triton"
BLOCK = [128, 128]
NO_BLOCK = "no block FP8 in this release's compressed-tensors"


def broken(played: dict[str, dict]) -> str | None:
    """Return why sglang itself cannot be imported, where it cannot without the plugin either."""
    if not played or not all("died" in result for result in played.values()):
        return None
    return played["stock, 12.0, on"]["died"].strip().splitlines()[-1]


def findings(played: dict[str, dict]) -> list[str]:
    """Return everything that did not hold in `{scenario's name: what was observed}`."""
    found = []
    if broken(played):
        return found
    for name, result in played.items():
        if "died" in result:
            found.append(f"{name}: the host's process died: {result['died'][-400:]}")
            continue
        rules = _stock if name.startswith("stock") else _with_plugin
        found += [f"{name}: {finding}" for finding in rules(name, result, played)]
    return found


def _stock(name: str, result: dict, played: dict) -> Iterator[str]:
    if result["wrapped"] or "sglang_kt_sm120" in result["imported"]:
        yield "the plugin is in a process that is meant to be stock"
    for ask in result["asks"]:
        if "got" not in ask:
            yield f"{ask['backend']}: {ask['error']['message']}"
        yield from _crash(ask)


def _crash(ask: dict) -> Iterator[str]:
    """Sglang's own function, called on such a card, may fail in the reported ways only."""
    error = ask.get("error", {}) if ask.get("stage") == "use" else {}
    if error and not any(words in error["message"] for words in CRASHES):
        yield f"stock fails in another way: {error['type']}: {error['message'][:200]}"


def _with_plugin(name: str, result: dict, played: dict) -> Iterator[str]:
    _, capability, state = name.split(", ")
    if state == "switched off":
        yield from _switched_off(result, played)
        return
    if not result["wrapped"] or result["twice"]:
        yield "dispatch is not wrapped exactly once"
    for level, text in result["log"]:
        if level == "ERROR" and not text.startswith("sglang refuses"):
            yield f"the plugin logged an error: {text[:200]}"
    for ask in result["asks"]:
        label = f"{ask['backend']} ({ask['method']})"
        if ask.get("block", BLOCK) != BLOCK:
            yield from _not_ours(ask, played)
        elif not capability.startswith("12."):
            if not ask.get("same"):
                yield f"{label}: not the host's own function object but {ask.get('got')}"
        elif ask["stock"].startswith("refused"):
            yield from _refused(ask, label, result)
        elif ask.get("error", {}).get("message") == NO_BLOCK:
            continue
        elif _theirs(ask, state, result):
            if not ask.get("same"):
                yield f"{label}: not the host's own function object but {ask.get('got')}"
        else:
            yield from _ours(ask, label)
    if (capability, state) == ("12.1", "absent") and not result["asks"][0].get("deterministic"):
        yield "--enable-deterministic-inference did not reach the choice of kernels"
    if state.startswith(VARIABLE):
        # Hosts with both names turn the old one into the new one, which the warning then names.
        read = any(on for name, on in result["reads"].items() if name.startswith(VARIABLE))
        read = read and result["asks"][0]["stock"].startswith(FLASHINFER)
        warned = [text for level, text in result["log"] if level == "WARNING"]
        if len(warned) != read or (read and VARIABLE not in warned[0]):
            yield f"{'one' if read else 'no'} warning about the variable expected: {warned}"


def _not_ours(ask: dict, played: dict) -> Iterator[str]:
    """Another block size, or none: loaded, it is left with what it has without the plugin."""
    others = played["plugin, 12.0, switched off"].get("asks", ())
    without = [other for other in others if other.get("block", BLOCK) == ask["block"]]
    seen = [_loaded(one) for one in (*without, ask)]
    if len(seen) != 2 or seen[0] != seen[1] or "sglang_kt_sm120" in str(seen[1]):
        yield f"blocks of {ask['block']}: {seen[-1]}, without the plugin {seen[:-1]}"


def _loaded(ask: dict) -> tuple:
    """What a load ended in: the function left, or the host's own error on a machine without GPU."""
    return ask.get("left"), ask.get("stage"), ask.get("error", {}).get("message", "")[:60]


def _theirs(ask: dict, state: str, result: dict) -> bool:
    if state == "SGLANG_SUPPORT_CUTLASS_BLOCK_FP8":  # counts where the host turned it into cutlass
        return result["reads"].get(state, False)
    return ask["backend"] not in OURS


def _refused(ask: dict, label: str, result: dict) -> Iterator[str]:
    """A refusal of the host's own stands, word for word, with our line that says what works."""
    message = ask.get("error", {}).get("message", "nothing")
    if ask["stock"] != f"refused: {message}":
        yield f"{label}: the host refuses ({ask['stock'][:80]}), we: {message[:80]}"
    if not any(level == "ERROR" and REMEDY in text for level, text in result["log"]):
        yield f"{label}: refused without a line that names what works"


def _ours(ask: dict, label: str) -> Iterator[str]:
    if "error" in ask:
        error = ask["error"]
        yield f"{label}: {error['type']}: {error['message'][:200]} at {error['frames'][-2:]}"
        return
    if not ask["ours"]:
        yield f"{label}: not served by the plugin but by {ask['got']}"
        return
    if not ask["load"]:
        return
    output = ask["output"]
    if ask["scale"] != "torch.float32":
        yield f"{label}: weight scales are {ask['scale']}"
    elif not (output["quantised"] < ROUNDING and output["exact"] < QUANTISATION):
        yield f"{label}: wrong numbers: {output}"


def _switched_off(result: dict, played: dict) -> Iterator[str]:
    if result["wrapped"] or "sglang_kt_sm120.host" in result["imported"] or result["log"]:
        yield "something of the plugin is left"
    for ask in result["asks"]:
        # With another block newer hosts answer with a partial, a new object for each layer.
        known = ask.get("block", BLOCK) == BLOCK and not ask["stock"].startswith("refused")
        if known and not ask.get("same"):
            yield f"{ask['backend']}: not the host's own function object"
        yield from _crash(ask)
    with_us = played["plugin, 12.0, off"]["asks"][0]["stock"]
    if result["asks"][0].get("got") != with_us:
        yield f"auto gives {result['asks'][0].get('got')}; with the plugin sglang's is {with_us}"


def loader_findings(loader: dict[str, list[dict]]) -> list[str]:
    """Return what did not hold of sglang's own plugin loader (play.loader)."""
    found = []
    #: (wrapped when fp8_utils was imported, wrapped after the loader) per scenario.
    expected = {
        "hook": [(True, True), (True, True), (False, False), (True, True)],
        "loader": [(False, True), (False, True), (False, False), (False, False)],
    }
    names = ("no allow-list", "allow-list with us", "allow-list without us", "no loader")
    for way, results in loader.items():
        for name, result, (hooked, wrapped) in zip(names, results, expected[way], strict=True):
            where = f"{way}, {name}"
            if "died" in result:
                found.append(f"{where}: died")
                continue
            if result["armed"] is not (way == "hook"):
                found.append(f"{where}: start-up hook armed: {result['armed']}")
            if (result["hooked"], result["wrapped"]) != (hooked, wrapped) or result["twice"]:
                found.append(f"{where}: wrapped {result['hooked']}, {result['wrapped']}")
            ask = result["asks"][0]
            if ask["ours"] is not wrapped or ask["same"] is wrapped:
                found.append(f"{where}: dispatch gives {ask['got']}")
    return found


def everything(record: dict) -> list[str]:
    """Return the findings of one record of the matrix."""
    return findings(record["played"]) + loader_findings(record["loader"])
