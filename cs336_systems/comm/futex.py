"""Sleep until another process changes a word of shared memory: Linux's futex(2) on x86-64."""

import ctypes

LIBC = ctypes.CDLL(None)
SYSCALL, WAIT, WAKE, ALL = 202, 0, 1, 2**31 - 1


def sleep_while(address: int, value: int, seconds: float) -> bool:
    """Sleep while the 32-bit word at an address has a value, for less than a second; returns False if woken."""
    limit = (ctypes.c_long * 2)(0, int(1e9 * seconds))  # a timespec of C: seconds and nanoseconds
    return bool(LIBC.syscall(SYSCALL, ctypes.c_void_p(address), WAIT, ctypes.c_int(value), limit, None, 0))


def wake(address: int) -> None:
    """Wake all processes that sleep on the word at an address."""
    LIBC.syscall(SYSCALL, ctypes.c_void_p(address), WAKE, ALL, None, None, 0)
