"""`legato serve --tp 2` on two GPUs: it answers over HTTP, and the death of a rank ends it in time, with 503 until then."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
import torch

from tests.cli.served_ranks import Served
from tests.processes import is_alive

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")]


def test_two_gpus_answer_and_the_death_of_one_rank_ends_the_server(tmp_path: Path) -> None:
    pytest.importorskip("uvicorn", reason="the server's packages are not installed")
    began = time.monotonic()
    served = Served(tmp_path, "cuda")
    try:
        print(f"ready after {time.monotonic() - began:.1f} s")
        assert "on cuda, 2 ranks, context 1024" in served.log.read_text()
        answers = [served.complete(64) for _ in range(2)]
        assert [status for status, _ in answers] == [200, 200]
        first, again = (json.loads(body) for _, body in answers)
        assert first["usage"]["completion_tokens"] == 64
        assert first["choices"][0]["text"] == again["choices"][0]["text"]
        print(repr(first["choices"][0]["text"]))
        message = {"role": "user", "content": "Sort a list."}
        status, stream = served.ask("/v1/chat/completions", {"messages": [message], "max_tokens": 16, "stream": True})
        assert status == 200 and stream.rstrip().endswith("data: [DONE]")
        assert served.ask("/health")[0] == 200
        family = served.family()
        os.kill(served.rank(), signal.SIGKILL)
        hurt, statuses = time.monotonic(), []
        while served.process.poll() is None:
            statuses.append(served.complete(200)[0])
            assert time.monotonic() - hurt < 10, (statuses, served.log.read_text())
            time.sleep(0.02)
        took = time.monotonic() - hurt
        print(f"ended {took:.2f} s after the death, statuses {statuses}")
        assert took < 5 and served.process.returncode == 1
        assert 503 in statuses and set(statuses) <= {500, 503, 0}
        assert "rank 1 is lost: killed by SIGKILL" in served.log.read_text()
        assert not [pid for pid in family if is_alive(pid)]
    finally:
        served.process.kill()
        served.process.wait()
