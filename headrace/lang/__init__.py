"""A small language for programs around a model: Python functions with ``gen``, ``select``, roles, ``fork``, ``join``.

from headrace import lang

@lang.program
def answer(s, question):
    s += lang.system("You are brief.")
    s += lang.user(question)
    s += lang.assistant(lang.gen("answer", max_tokens=32, stop="\\n"))

with lang.local("smollm2") as model:
    print(answer.run(model, question="Name one river.")["answer"])
"""

from headrace.lang.backend import Backend, GenSpec
from headrace.lang.connect import connect, local, model_of_command_line, open_model
from headrace.lang.pieces import Pieces, assistant, gen, select, system, user
from headrace.lang.program import Program, program
from headrace.lang.state import State

__all__ = [
    "Backend",
    "GenSpec",
    "Pieces",
    "Program",
    "State",
    "assistant",
    "connect",
    "gen",
    "local",
    "model_of_command_line",
    "open_model",
    "program",
    "select",
    "system",
    "user",
]
