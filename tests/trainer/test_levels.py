"""How far a checkpoint has come, asked for by a thread that is interrupted."""

from __future__ import annotations

import dis
import sys
import threading
from types import CodeType, FrameType
from typing import Any

from ckpt.trainer import levels
from ckpt.trainer.levels import Levels
from ckpt.types import Tick

ONE, TWO = Tick(1), Tick(2)


def use(it: Levels) -> None:
    it.expect(TWO)
    it.retry(TWO)
    it.put(ONE, "store", True)
    it.wait(ONE, "store", 1.0)
    assert (it.level(ONE), it.newest("store"), it.are_open, it.is_staged(TWO)) == ("store", ONE, True, False)


class Interrupt:
    """Ctrl-C behind the `number`-th call, where the interpreter hears it."""

    def __init__(self, number: int) -> None:
        self.left = number
        self._names: dict[CodeType, dict[int, str]] = {}
        self._before: dict[FrameType, str] = {}

    def __call__(self, frame: FrameType, event: str, arg: Any) -> Any:
        code = frame.f_code
        if code.co_filename != levels.__file__:
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            names = self._names.setdefault(code, {i.offset: i.opname for i in dis.get_instructions(code)})
            before, self._before[frame] = self._before.get(frame, ""), names[frame.f_lasti]
            self.left -= before.startswith("CALL")
            if before.startswith("CALL") and self.left == 0:
                raise KeyboardInterrupt
        return self


def test_an_interrupt_anywhere_leaves_nothing_locked() -> None:
    number, interrupted = 0, True
    while interrupted:
        number, interrupted = number + 1, False
        it, traced = Levels(), sys.gettrace()
        sys.settrace(Interrupt(number))
        try:
            use(it)
        except KeyboardInterrupt:
            interrupted = True
        finally:
            sys.settrace(traced)
        thread = threading.Thread(target=it.fail_all, args=("the end",), daemon=True)
        thread.start()
        thread.join(60)
        assert not thread.is_alive(), number
    assert number > 10
