"""Commands; everything heavy is imported inside them."""
