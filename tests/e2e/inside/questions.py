"""What every engine and server of the end-to-end tests is asked, and what is kept of it."""

from __future__ import annotations

#: One batch of three lengths (the last is longer than a decode batch), one of twelve tokens.
BATCHES = (
    [[5, 6, 7, 8], list(range(10, 60)), [(37 * i + 11) % 4000 for i in range(300)]],
    [[token] for token in range(100, 112)],
)
SAMPLING = {"temperature": 0, "max_new_tokens": 16, "ignore_eos": True}
TOP = 5


def options() -> dict:
    """Return what both the engine's `generate` and a POST to /generate take."""
    return {
        "sampling_params": SAMPLING,
        "return_logprob": True,
        "logprob_start_len": 0,  # the prompt's own tokens too: same inputs whatever is generated
        "top_logprobs_num": TOP,
    }


def http_body(batch: list[list[int]]) -> dict:
    """Return the body of a POST to /generate."""
    return {"input_ids": batch, **options()}


def tidy(answer: dict) -> dict:
    """Keep tokens, log-probabilities (the prompt's too), and each step's `TOP` candidates."""
    info = answer["meta_info"]
    return {
        "tokens": answer["output_ids"],
        "prompt": [entry[0] for entry in info["input_token_logprobs"] if entry[0] is not None],
        "logprobs": [entry[0] for entry in info["output_token_logprobs"]],
        "top": [[[t[0], t[1]] for t in step] for step in info["output_top_logprobs"]],
    }
