"""How the weight of a `Linear` is stored and multiplied with: one file per weight format, listed in `formats`."""
