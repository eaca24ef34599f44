"""`python -m forebay` is `forebay`."""

from forebay.cli import main

main()
