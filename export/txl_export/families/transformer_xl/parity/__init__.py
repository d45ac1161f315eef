"""Whether a Transformer-XL's bundle is the same function as its reference: memory rows, texts, layers."""
