"""What a deployment would carry, before anybody buys it: plans, their figures, and simulations."""
