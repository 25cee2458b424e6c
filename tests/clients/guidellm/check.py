"""guidellm against the server at argv[1]: a short benchmark, four streams at once, and whether it counts as the server does."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

URL = sys.argv[1]
TOKENIZER = Path(__file__).resolve().parents[3] / "legato" / "checkpoints" / "small"
STREAMS, REQUESTS, OUTPUT_TOKENS = 4, 12, 12

with tempfile.TemporaryDirectory() as folder:
    out = Path(folder) / "out.json"
    command = [str(Path(sys.executable).with_name("guidellm")), "run", "--disable-progress"]
    command += ["--backend", f"kind=openai_http,target={URL},model=small"]
    command += [
        "--profile",
        f"kind=concurrent,streams={STREAMS}",
        "--constraint",
        f"kind=max_requests,count={REQUESTS}",
    ]
    command += ["--data", f"kind=synthetic_text,prompt_tokens=64,output_tokens={OUTPUT_TOKENS}"]
    command += ["--tokenizer", f"kind=huggingface_auto,model={TOKENIZER}", "--output", f"kind=json,path={out}"]
    offline = {"HF_HUB_OFFLINE": "1", "HF_HOME": folder}
    subprocess.run(command, check=True, cwd=folder, env={**os.environ, **offline})
    (benchmark,) = json.loads(out.read_text())["benchmarks"]

requests = benchmark["requests"]
# On a machine with more to do than it can, guidellm has told of eleven of twelve, and of none that failed.
assert len(requests["successful"]) >= REQUESTS - 1 and not requests["errored"] and not requests["incomplete"], requests
for request in requests["successful"]:
    assert request["output_metrics"]["text_tokens"] == OUTPUT_TOKENS, request
    assert request["time_to_first_token_ms"] > 0, request
