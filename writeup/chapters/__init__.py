"""One chapter per file: `content(book)` returns what the template of the same name shows."""
