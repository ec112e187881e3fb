"""Fixtures of these tests."""

from tests.one_thread import one_thread_no_grad as one_thread_no_grad
