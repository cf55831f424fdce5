"""`python -m bench ulysses`: sequence exchanges, beside a collective with its permutations."""
