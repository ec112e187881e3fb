"""What travels between executor and ranks comes out as it went in, however the bytes are cut."""

from __future__ import annotations

import random
import socket

import msgspec
import numpy as np

from headrace.core.output import ModelRunnerOutput, NewRequest, SchedulerOutput
from headrace.core.token_mask import TokenMask
from headrace.runtime.multiproc_executor import _sample_message
from headrace.runtime.rank_loop import _mask_of
from headrace.runtime.rank_messages import RankEar, RankFailed, RankOutput, RankVoice, RunStep, Sample, ToRank
from headrace.sampling_params import SamplingParams


def through(message: ToRank) -> ToRank:
    return msgspec.msgpack.decode(msgspec.msgpack.encode(message), type=ToRank)


def test_a_step_and_its_mask() -> None:
    new = NewRequest("a", [1, 2], 2, [[0], [3]], SamplingParams(temperature=0.5, top_p=0.9), 7)
    step = RunStep(SchedulerOutput(3, ["a"], [0], [2], [0], [new]))
    assert through(step) == step
    mask = TokenMask(np.array([1, 4]), np.arange(6, dtype=np.uint32).reshape(2, 3))
    sample = through(_sample_message(mask))
    assert isinstance(sample, Sample)
    back = _mask_of(sample)
    assert back is not None
    assert np.array_equal(back.rows, mask.rows) and np.array_equal(back.words, mask.words)
    assert back.rows.dtype == np.int64 and back.words.dtype == np.uint32
    plain = through(_sample_message(None))
    assert isinstance(plain, Sample) and _mask_of(plain) is None


def test_an_ear_puts_messages_together() -> None:
    ours, theirs = socket.socketpair()
    voice, rng = RankVoice(theirs), random.Random(0)
    sent = [RankOutput(ModelRunnerOutput(step, ["a"], [[step] * (step * 40)])) for step in range(20)]
    sent.append(RankFailed("ValueError", "boom"))
    for message in sent:
        voice.send(message)
    theirs.close()
    ear, heard = RankEar(), []
    while data := ours.recv(rng.randrange(1, 700)):
        heard += ear.hear(data)
    assert heard == sent
