"""`python -m sglang.bench_one_batch`, the real command in a real process, as far as no GPU goes.

It runs models without a server and never calls sglang's plugin loader, so only the start-up hook
can bring the plugin in. See stand_in.py for where it ends and what it reports.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

from tests.hosts import client, lab, releases
from tests.hosts.probe import MARK

#: The start of a `.pth` line that brings stand_in.py into an interpreter.
START = f"import sys; sys.path.append({str(lab.HERE)!r}); import stand_in"
CONFIG = {
    "architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 256,
    "intermediate_size": 512, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4, "head_dim": 64, "vocab_size": 512, "max_position_embeddings": 512,
    "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": True, "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic", "fmt": "e4m3",
                            "weight_block_size": [128, 128]},
}  # fmt: skip
#: What ends every play (stand_in.py, which imports nothing of this package).
END = "torch.cuda.set_device: the stand-in GPU ends here"
#: The command moved; old hosts have the first.
MODULES = ("sglang.bench_one_batch", "sglang.benchmark.one_batch")


def play(host: releases.Host, plugin: Path, folder: Path, hook: bool = True) -> dict:
    """Run the command on `host` with the plugin installed; without `hook`, with no start-up line.

    Returns what the process reported, its "stderr", and the "module" that was run.
    """
    installed = releases.with_plugin(host, plugin, hook)
    lines = releases._site(installed.root).joinpath("layers.pth").read_text().splitlines()
    root = installed.root.with_name(f"{installed.root.name}-one-batch")
    python = (
        releases._venv(root, [*lines, f"{START}; stand_in.present(); stand_in.report_at_exit()"])
        / "bin"
        / "python"
    )
    (folder / "config.json").write_text(json.dumps(CONFIG))
    old = (host.own / "sglang" / "bench_one_batch.py").is_file()
    module = MODULES[0 if old else 1]
    command = [python, "-m", module, "--model-path", folder, "--load-format", "dummy",
               "--skip-tokenizer-init", "--batch-size", "1", "--input-len", "8",
               "--output-len", "2"]  # fmt: skip
    result = subprocess.run(
        command,
        env=client.environment(
            SGLANG_KT_SM120_TEST_CAPABILITY="12.0",
            SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK="1",  # it looks for a package that is absent here
            HF_HUB_OFFLINE="1",
        ),
        capture_output=True,
        text=True,
    )
    lines = [line for line in result.stdout.splitlines() if line.startswith(MARK)]
    if len(lines) != 1:
        raise lab.LabError(f"{len(lines)} reports of {module}\n{result.stderr[-3000:]}")
    said = json.loads(lines[0].removeprefix(MARK))
    return said | {"stderr": result.stdout + result.stderr, "module": module}
