"""Engines behind HTTP servers, seen as an engine process is seen: orders out, token rows in."""
