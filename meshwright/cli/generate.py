"""`meshwright generate`: continue a prompt, every prompt of a file, or what is typed."""

from __future__ import annotations

from typing import Any

import typer

EXAMPLE = "Example: meshwright generate runs/quickstart --prompt 'The import statement' --max-tokens 64"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def generate(
        model: str = typer.Argument(..., help="Run folder, or a folder made by convert."),
        prompt: str | None = typer.Option(None, help="Text to continue."),
        prompts: str | None = typer.Option(
            None, help='File with a prompt a line, or .jsonl rows with "prompt"; needs --output.'
        ),
        output: str | None = typer.Option(None, help="JSONL file to write: index, prompt, text, tokens, finish."),
        interactive: bool = typer.Option(False, "--interactive", help="Read prompts from the terminal, one a line."),
        max_tokens: int = typer.Option(64, min=0, help="Longest continuation."),
        temperature: float = typer.Option(0.0, min=0.0, help="0 takes the most likely token each time."),
        top_k: int = typer.Option(0, min=0, help="Draw among the k most likely; 0: all."),
        top_p: float = typer.Option(1.0, help="Draw among the fewest tokens that have this probability together."),
        seed: int = typer.Option(0, min=0, help="Prompt i of a file has seed + i."),
        tp: int | None = typer.Option(None, min=1, help="With --prompts: ranks that hold each matrix together."),
        pp: int | None = typer.Option(None, min=1, help="With --prompts: pipeline stages."),
        dp: int | None = typer.Option(None, min=1, help="With --prompts: copies of the model."),
        devices: str | None = typer.Option(None, help="With --prompts: numbers of the devices to use, e.g. 0,2."),
        device: str | None = typer.Option(None, help="With --prompts: cpu, cuda, ...; default: what torch finds."),
        dtype: str | None = typer.Option(None, help="With --prompts: of the weights: fp32, bf16 or fp16."),
        quantization: str | None = typer.Option(None, help="With --prompts: fp8: the matrices of all layers in 8 bits."),
        kv_cache_dtype: str | None = typer.Option(None, help="With --prompts: fp8: keys and values in 8 bits."),
        max_running: int | None = typer.Option(
            None, min=1, max=1 << 16, help="With --prompts: at a time, a copy; default: 512, CPU 64."
        ),
        token_budget: int | None = typer.Option(None, min=1, help="With --prompts: tokens a step; default: 16,384, CPU 512."),
        blocks: int | None = typer.Option(None, min=1, help="With --prompts: blocks of a copy's KV cache."),
        best: bool = typer.Option(False, "--best", help="The checkpoint with the best held-out loss instead of the newest."),
    ) -> int:
        """Print the prompt and its continuation; or write the continuations of a file; or answer what is typed."""
        drawn: dict[str, Any] = {
            "max_tokens": max_tokens,
            "temperature": temperature,
            "top_k": top_k,
            "top_p": top_p,
            "seed": seed,
        }
        engine = {
            "tp": tp, "pp": pp, "dp": dp, "device": device, "dtype": dtype,
            "quantization": quantization, "kv_cache_dtype": kv_cache_dtype,
            "max_running": max_running, "token_budget": token_budget, "blocks": blocks,
        }  # fmt: skip
        given = {key: value for key, value in engine.items() if value is not None}
        _check(prompt, prompts, output, interactive, best, [*given, *(["devices"] if devices is not None else [])])
        if prompt is not None:
            from meshwright.runtime.trained import continue_text, load_trained

            typer.echo(continue_text(load_trained(model, best=best), prompt, **drawn))
            return 0
        if prompts is not None and output is not None:
            from meshwright.serve.batch import BatchCommand

            return BatchCommand(model, prompts, output, drawn, given, devices).run()
        from meshwright.serve.engine import LLMEngine
        from meshwright.serve.sampling import SamplingParams

        params = SamplingParams(**drawn)
        return _typed(LLMEngine.load(model), params)


def _check(
    prompt: str | None, prompts: str | None, output: str | None, interactive: bool, best: bool, engine: list[str]
) -> None:
    import importlib.util

    from meshwright.errors import Finding, UserError

    findings = []
    if (prompt is not None) + (prompts is not None) + interactive != 1:
        fix = "Give one of --prompt TEXT, --prompts FILE with --output FILE, and --interactive"
        findings.append(Finding("the prompt", "is given by one flag", fix))
    if (prompts is None) != (output is None):
        findings.append(Finding("--output", "goes with --prompts, and --prompts with it"))
    if best and prompt is None:
        findings.append(Finding("--best", "is for --prompt", "Name the checkpoint's folder as MODEL"))
    if prompts is None:
        findings += [Finding(f"--{key.replace('_', '-')}", "is for --prompts", "Leave it out") for key in engine]
    if prompt is None and not findings and importlib.util.find_spec("fastapi") is None:
        flag = "--prompts" if prompts is not None else "--interactive"
        what = "runs on the engine of the server, which needs fastapi"
        findings.append(Finding(flag, what, "Install it with: pip install 'meshwright[serve]'"))
    if findings:
        raise UserError(findings=findings)


def _typed(engine: Any, params: Any) -> int:
    import sys

    from meshwright.errors import DataError
    from meshwright.serve.offline import streamed

    typer.echo("One prompt a line; Ctrl-D ends.", err=True)
    for line in sys.stdin:
        if line.strip():
            try:
                streamed(engine, line.rstrip("\n"), params, lambda text: typer.echo(text, nl=False))
            except DataError as error:
                typer.echo(str(error), err=True)
            typer.echo()
    return 0
