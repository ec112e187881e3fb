from __future__ import annotations

import signal

from headrace.observe.process_end import describe_end


def test_a_signal_comes_with_what_it_most_likely_means() -> None:
    assert describe_end(3) == "ended with status 3; its messages on standard error say why"
    assert describe_end(-signal.SIGTERM) == "was ended by SIGTERM"
    assert "out of memory" in describe_end(-signal.SIGKILL)
    assert "a file that it had mapped may have been cut" in describe_end(-signal.SIGBUS)
    assert describe_end(-signal.SIGRTMIN - 1) == f"was ended by signal {signal.SIGRTMIN + 1}"
