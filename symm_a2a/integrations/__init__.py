"""Expert-parallel layers of other libraries, over this one; each module needs the library of its name."""
