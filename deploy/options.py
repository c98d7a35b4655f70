"""Options that several commands take."""

from pathlib import Path
from typing import Annotated

import typer

ApiKey = Annotated[
    str | None,
    typer.Option(
        envvar="BATON_API_KEY",
        show_envvar=True,
        help="Shown to the router. Default: the first of the cluster's file of keys.",
    ),
]
Ca = Annotated[
    Path | None, typer.Option(help="CA of the router's certificate, PEM. Default: the cluster's own.")
]
Cert = Annotated[
    Path | None, typer.Option(help="Certificate of the client, PEM, where the router asks for one.")
]
Key = Annotated[Path | None, typer.Option(help="Private key of --cert, PEM.")]

DEFAULT_CLUSTER = "default"
Cluster = Annotated[str, typer.Option("--cluster", help="Name of the cluster, for several on one machine.")]
Router = Annotated[
    str | None, typer.Option("--router", help="host:port of a gRPC door. Default: that of the cluster.")
]
MaxTokens = Annotated[
    int | None, typer.Option(help="Longest answer. Default: what the context leaves.", min=1)
]
Temperature = Annotated[float | None, typer.Option(help="0 is greedy. Default: 1.", min=0)]
Seed = Annotated[int | None, typer.Option(help="The same seed gives the same answer.", min=0)]
