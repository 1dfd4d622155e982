"""OpenAI's schema on one side, prfaas' types on the other; pure, no I/O."""
