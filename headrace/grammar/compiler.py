"""GrammarCompiler: compiles constraints in threads of its own, once for each content."""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from headrace.errors import GrammarError
from headrace.grammar.base import CompiledGrammar, GrammarBackend, TokenVocabulary, load_backend
from headrace.structured_outputs import Constraint

MAX_CACHED = 256
MAX_CACHED_TEXT = 16 << 20
NUM_THREADS = 2


class PendingGrammar:
    """A constraint that is being compiled, or has been.

    since: monotonic seconds when compiling was asked for.
    """

    def __init__(self, constraint: Constraint, future: Future[CompiledGrammar], since: float) -> None:
        self.constraint = constraint
        self.future = future
        self.since = since

    def is_done(self) -> bool:
        """True once there is a grammar or an error."""
        return self.future.done()

    def result(self) -> CompiledGrammar:
        """The grammar; call it when ``is_done``. Raises GrammarError."""
        return self.future.result(0)


class GrammarCompiler:
    """A cache of compiled grammars, keyed by content; the least recently used leave it.

    The tokenizer and the libraries are loaded by the first constraint, in its thread, and so cost nothing where
    nothing is constrained.

    Args:
        load_vocabulary: reads the model's tokens; called once, in a compile thread.
    """

    def __init__(self, load_vocabulary: Callable[[], TokenVocabulary]) -> None:
        self._load_vocabulary = load_vocabulary
        self._vocabulary: TokenVocabulary | None = None
        self._backends: dict[str, GrammarBackend] = {}
        self._loading = threading.Lock()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="headrace-grammar")
        self._cache: OrderedDict[Constraint, PendingGrammar] = OrderedDict()
        self._cached_text = 0
        self.num_compiled = 0

    def submit(self, constraint: Constraint) -> PendingGrammar:
        """The grammar of a constraint: from the cache, or on its way."""
        found = self._cache.get(constraint)
        if found is not None and not (found.is_done() and found.future.exception() is not None):
            self._cache.move_to_end(constraint)
            return found
        self.num_compiled += 1
        pending = PendingGrammar(constraint, self._pool.submit(self._compile, constraint), time.monotonic())
        if found is None:
            self._cached_text += len(constraint.text)
        self._cache[constraint] = pending
        self._evict()
        return pending

    @property
    def vocabulary(self) -> TokenVocabulary:
        """The model's tokens; there once anything has been compiled."""
        assert self._vocabulary is not None
        return self._vocabulary

    def shutdown(self) -> None:
        """Take no more constraints; what is being compiled is dropped."""
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _evict(self) -> None:
        while len(self._cache) > MAX_CACHED or (self._cached_text > MAX_CACHED_TEXT and len(self._cache) > 1):
            constraint, _ = self._cache.popitem(last=False)
            self._cached_text -= len(constraint.text)

    def _compile(self, constraint: Constraint) -> CompiledGrammar:
        try:
            return self._backend(constraint.backend).compile(constraint)
        except GrammarError:
            raise
        except RecursionError:
            raise GrammarError(
                f"structured_outputs.{constraint.kind} is nested too deeply to be compiled: make it flatter",
                param=f"structured_outputs.{constraint.kind}",
                code="constraint_too_deep",
            ) from None
        except Exception as error:  # a fault of ours or of a library must end this request, not the engine
            raise GrammarError(
                f"structured_outputs.{constraint.kind} could not be compiled ({type(error).__name__}: {error})",
                param=f"structured_outputs.{constraint.kind}",
                code="constraint_not_compiled",
            ) from error

    def _backend(self, name: str) -> GrammarBackend:
        with self._loading:
            if self._vocabulary is None:
                self._vocabulary = self._load_vocabulary()
            backend = self._backends.get(name)
            if backend is None:
                backend = self._backends[name] = load_backend(name, self._vocabulary)
            return backend
