"""lm-eval against the server at argv[1]: a local task by log-likelihood (token ids, echo, logprobs) and by generation, over text
completions, and by generation over chat. Log-likelihoods must be those that the server's own /v1/completions tells."""

import json
import os
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

URL, HERE = sys.argv[1], Path(__file__).resolve().parent
TOKENIZER = HERE.parents[2] / "legato" / "checkpoints" / "small"
PAIRS = [("def add(a, b):\n    return a +", " b"), ("import numpy", " as np"), ("for i in", " range")]


def evaluate(model: str, path: str, task: str, out: Path, *more: str) -> dict:
    arguments = f"base_url={URL}{path},model=small,tokenizer={TOKENIZER},num_concurrent=4,max_retries=1,timeout=300"
    command = [str(Path(sys.executable).with_name("lm_eval")), "--model", model, "--model_args", arguments]
    command += [
        "--tasks",
        task,
        "--include_path",
        str(out),
        "--output_path",
        str(out / "results"),
        "--log_samples",
        *more,
    ]
    offline = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "HF_HOME": str(out), "OPENAI_API_KEY": "none"}
    subprocess.run(command, check=True, cwd=out, env={**os.environ, **offline})
    samples = max((out / "results").rglob(f"samples_{task}_*.jsonl"), key=lambda file: file.stat().st_mtime)
    results = max((out / "results").rglob("results_*.json"), key=lambda file: file.stat().st_mtime)
    lines = [json.loads(line) for line in samples.read_text().splitlines()]
    return {"samples": lines, "results": json.loads(results.read_text())["results"][task]}


def post(path: str, **body: object) -> dict:
    data = json.dumps({"model": "small", **body}).encode()
    request = urllib.request.Request(URL + path, data, {"content-type": "application/json"})
    return json.load(urllib.request.urlopen(request, timeout=300))


def likelihood(context: str, continuation: str) -> float:
    """Of a continuation, from the server itself."""
    before = post("/tokenize", prompt=context, add_special_tokens=False)["tokens"]
    whole = post("/tokenize", prompt=context + continuation, add_special_tokens=False)["tokens"]
    assert whole[: len(before)] == before, "the cut is not between two tokens"
    told = post("/v1/completions", prompt=whole, max_tokens=1, echo=True, logprobs=1, temperature=0)["choices"][0]
    return sum(told["logprobs"]["token_logprobs"][len(before) : len(whole)])


with tempfile.TemporaryDirectory() as name:
    out = Path(name)
    rows = [{"context": context, "right": right, "wrong": " zebra"} for context, right in PAIRS]
    (out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    shared = f"dataset_path: json\ndataset_kwargs: {{data_files: {{test: {out}/rows.jsonl}}}}\ntest_split: test\n"
    (out / "choose.yaml").write_text(
        f"task: choose\n{shared}output_type: multiple_choice\ndoc_to_text: '{{{{context}}}}'\n"
        "doc_to_choice: '{{[right, wrong]}}'\ndoc_to_target: 0\ntarget_delimiter: ''\nmetric_list: [{metric: acc}]\n"
    )
    (out / "write.yaml").write_text(
        f"task: write\n{shared}output_type: generate_until\ndoc_to_text: '{{{{context}}}}'\ndoc_to_target: '{{{{right}}}}'\n"
        "generation_kwargs: {until: ['zzzz'], max_gen_toks: 12, temperature: 0}\nmetric_list: [{metric: exact_match}]\n"
    )
    chosen = evaluate("local-completions", "/v1/completions", "choose", out)
    assert len(chosen["samples"]) == len(PAIRS), chosen
    for sample in chosen["samples"]:
        doc = sample["doc"]
        for response, choice in zip(sample["filtered_resps"], ("right", "wrong"), strict=True):
            told = float(response[0])
            assert abs(told - likelihood(doc["context"], doc[choice])) < 1e-3, (doc, choice, told)
    written = evaluate("local-completions", "/v1/completions", "write", out)
    for sample in written["samples"]:
        context = sample["doc"]["context"]
        again = post("/v1/completions", prompt=context, add_special_tokens=False, max_tokens=12, temperature=0)
        assert sample["resps"][0][0] == again["choices"][0]["text"], (sample["resps"], again)
    chatted = evaluate("local-chat-completions", "/v1/chat/completions", "write", out, "--apply_chat_template")
    assert len(chatted["samples"]) == len(PAIRS) and all("resps" in sample for sample in chatted["samples"]), chatted
