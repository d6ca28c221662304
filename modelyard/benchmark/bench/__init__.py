"""`modelyard bench`: what a model or a server gives at so many streams, and how two compare in one interleaved run."""
