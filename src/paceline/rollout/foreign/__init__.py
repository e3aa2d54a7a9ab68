"""What runs in another Python than paceline's, beside an engine that is installed there only.

These files import nothing of paceline but one another and `paceline.sync.fingerprint`, and no package's `__init__`
runs there (`remote/child.py` says how), so that an environment with vLLM and without paceline's requirements serves.
"""
