"""Where the time went: spans, the ledger, metrics, FLOPs, and the records they leave. Imports no torch."""
