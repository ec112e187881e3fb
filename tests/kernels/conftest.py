"""Fixtures of these tests."""

from tests.one_thread import one_thread as one_thread
