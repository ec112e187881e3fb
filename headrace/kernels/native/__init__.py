"""Ops in C++ (csrc/) for CPUs, loaded with ctypes from a shared library beside this file."""
