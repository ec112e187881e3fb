"""Triton kernels for NVIDIA GPUs, one file per op of ``headrace.kernels.registry``, each tested against its reference.

Set TRITON_INTERPRET=1 before importing them to run them on a CPU, slowly, in Triton's interpreter.
"""
