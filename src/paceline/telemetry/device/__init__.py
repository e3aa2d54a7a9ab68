"""What devices and host were doing while a run ran: samples beside the ledger. Torch-free."""
