"""`python -m prfaas` is `prfaas`."""

from prfaas.cli.main import main

main(prog_name="prfaas")
