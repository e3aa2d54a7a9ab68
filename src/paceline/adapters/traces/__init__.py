"""Traces and timeline rows of any framework: what ran when, by rank, as ledger and causes."""
