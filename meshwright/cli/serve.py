"""`meshwright serve`: a trained model behind HTTP."""

from __future__ import annotations

import typer

PACKAGES = ("fastapi", "uvicorn", "prometheus_client", "jinja2")
EXAMPLE = "Example: meshwright serve runs/quickstart --port 8000"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def serve(
        model: str = typer.Argument(..., help="Run folder, or a folder made by convert."),
        host: str = typer.Option("127.0.0.1", help="Address to listen on; one that others reach needs a key."),
        port: int = typer.Option(8000, min=0, max=65535, help="0: a free one, which is printed."),
        name: str | None = typer.Option(None, help="Name of the model in the API; default: the folder's."),
        api_key_file: str | None = typer.Option(
            None, help="File with a key a line; default: the variable MESHWRIGHT_API_KEY, else no key."
        ),
        no_key: bool = typer.Option(False, "--no-key", help="Let everybody in who reaches the address."),
        tp: int | None = typer.Option(
            None, min=1, help="Ranks that share each matrix; default: as few as it fits, or what --dp leaves."
        ),
        pp: int | None = typer.Option(None, min=1, help="Pipeline stages; default: 1, where tp is enough."),
        dp: int | None = typer.Option(None, min=1, help="Copies of the model; default: as many as there are devices for."),
        devices: str | None = typer.Option(None, help="Numbers of the devices to use, e.g. 0,2."),
        device: str | None = typer.Option(None, help="cpu, cuda, ...; default: what torch finds."),
        dtype: str | None = typer.Option(None, help="Of the weights: fp32, bf16 or fp16; default: as stored, bf16 on a GPU."),
        quantization: str | None = typer.Option(None, help="fp8: the matrices of all layers in 8 bits."),
        kv_cache_dtype: str | None = typer.Option(None, help="fp8: keys and values in 8 bits; default: as the weights."),
        max_running: int | None = typer.Option(
            None, min=1, max=1 << 16, help="Most requests computed together; default: 256, on a CPU 64."
        ),
        token_budget: int | None = typer.Option(None, min=1, help="Most tokens of a step; default: 2,048, on a CPU 512."),
        blocks: int | None = typer.Option(None, min=1, help="Blocks of the KV cache; default: what there is room for."),
        max_queue: int = typer.Option(256, min=1, help="Requests that may wait; more are answered with 429."),
        max_queue_tokens: int = typer.Option(1 << 18, min=1, help="Prompt tokens that may wait."),
        max_body: int = typer.Option(4 << 20, min=1024, help="Bytes of a request body."),
        drain: float = typer.Option(30.0, min=0.0, help="Seconds that requests under way get after SIGTERM."),
        stall: float = typer.Option(60.0, min=1.0, help="Seconds of a step after which /ready says no."),
        dry_run: bool = typer.Option(False, "--dry-run", help="Check everything, print the plan, start nothing."),
    ) -> int:
        """Answer OpenAI-shaped requests, and a page at / to try the model in a browser. SIGTERM finishes what is under way."""
        import importlib.util

        from meshwright.errors import DeviceError, Finding

        missing = [package for package in PACKAGES if importlib.util.find_spec(package) is None]
        if missing:
            what = f"needs {', '.join(missing)}"
            raise DeviceError(findings=[Finding("serve", what, "Install them with: pip install 'meshwright[serve]'")])
        from meshwright.serve.command import ServeCommand
        from meshwright.serve.http import Limits
        from meshwright.serve.server import ServerOptions

        engine = {
            "tp": tp, "pp": pp, "dp": dp, "device": device, "dtype": dtype,
            "quantization": quantization, "kv_cache_dtype": kv_cache_dtype,
            "max_running": max_running, "token_budget": token_budget, "blocks": blocks,
        }  # fmt: skip
        options = ServerOptions(
            host=host,
            port=port,
            max_queue=max_queue,
            max_queue_tokens=max_queue_tokens,
            drain_s=drain,
            stall_s=stall,
            limits=Limits(max_body=max_body),
        )
        given = {key: value for key, value in engine.items() if value is not None}
        return ServeCommand(model, options, given, name, api_key_file, no_key, devices, dry_run).run()
