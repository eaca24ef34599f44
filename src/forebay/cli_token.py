"""`forebay token`: fresh tokens and tenants' secrets, each shown or written once and kept nowhere else."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Annotated

import typer

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="""Make tokens for the daemon's credentials table, and secrets for its tenants.

    Example:  forebay token new ci --tenant acme --right read""",
)


@app.command()
def new(
    name: Annotated[str, typer.Argument(help="Label of the credential, for logs.")],
    tenant: Annotated[str, typer.Option(help="The tenant that the token acts for.")] = "default",
    right: Annotated[list[str] | None, typer.Option(help="read, write or admin; several times.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document.")] = False,
) -> None:
    """Print a fresh token, and the lines for the daemon's settings that let it in.

    The token is shown this once: give it to the client as FOREBAY_TOKEN, or in a file of mode 0600 as
    FOREBAY_TOKEN_FILE. The settings hold its digest only.

    [bold]Example[/bold]  forebay token new engines --tenant acme --right read --right write
    """
    from forebay.server import auth

    rights = list(dict.fromkeys(right or ["read", "write"]))
    if unknown := set(rights) - set(auth.RIGHTS):
        raise typer.BadParameter(f"no right {min(unknown)!r}: there are {', '.join(auth.RIGHTS)}")
    for what, given in (("NAME", name), ("--tenant", tenant)):
        if not auth.PLAIN_NAME.fullmatch(given):
            raise typer.BadParameter("use up to 64 letters, digits, _ and -", param_hint=what)
    token = auth.new_token()
    digest = auth.token_digest(token).hex()
    listed = ", ".join(f'"{each}"' for each in rights)
    lines = f'[credentials.{name}]\ntenant = "{tenant}"\nrights = [{listed}]\ntoken_sha256 = "{digest}"'
    if as_json:
        print(json.dumps({"token": token, "settings": lines}, indent=2))
    else:
        print(f"{token}\n\n{lines}")


@app.command()
def secret(path: Annotated[Path, typer.Argument(metavar="FILE", help="A file that isn't there yet.")]) -> None:
    """Write a fresh tenant's secret into a new file of mode 0600.

    Daemons that share tiers must share it: another secret gives all namespaces of the tenant other names.

    [bold]Example[/bold]  forebay token secret /etc/forebay/acme.secret
    """
    from forebay.kvstore.secretfile import write_secret_file
    from forebay.server import auth

    try:
        write_secret_file(path, auth.new_secret())
    except FileExistsError:
        raise typer.BadParameter(
            f"{path} is there already: a new secret would rename all namespaces of its tenant", param_hint="FILE"
        ) from None
    except OSError as exc:
        print(f"forebay: {path}: {exc.strerror}", file=sys.stderr)
        raise typer.Exit(1) from exc
