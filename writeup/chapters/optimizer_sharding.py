"""Sharding the optimizer's state: memory saved, time added, and the difference from ZeRO stage 1."""

from typing import Any

from writeup.book import Book
from writeup.chapters import sharding_published as published


def content(book: Book) -> dict[str, Any]:
    """Memory at three points, ours and predicted for the course's sizes; times; collectives; the commentary."""
    return {
        "course": published.course(book),
        "parts": published.parts(book),
        "students": published.students(book),
        "their_times": published.their_times(book),
        "collectives": published.collectives(book),
        "shares": published.shares(book),
    }
