"""`meshwright generate`: continue a prompt."""

from __future__ import annotations

import typer

EXAMPLE = "Example: meshwright generate runs/quickstart --prompt 'The import statement' --max-tokens 64"


def register(app: typer.Typer) -> None:
    @app.command(epilog=EXAMPLE)
    def generate(
        model: str = typer.Argument(..., help="Run folder, or a folder made by convert."),
        prompt: str = typer.Option(..., help="Text to continue."),
        max_tokens: int = typer.Option(64, min=0, help="Longest continuation."),
        temperature: float = typer.Option(0.0, min=0.0, help="0 takes the most likely token each time."),
        top_k: int = typer.Option(0, min=0, help="Draw among the k most likely; 0: all."),
        top_p: float = typer.Option(1.0, help="Draw among the fewest tokens that have this probability together."),
        seed: int = typer.Option(0, min=0),
        best: bool = typer.Option(False, "--best", help="The checkpoint with the best held-out loss instead of the newest."),
    ) -> int:
        """Print the prompt and its continuation."""
        from meshwright.runtime.trained import continue_text, load_trained

        trained = load_trained(model, best=best)
        typer.echo(
            continue_text(trained, prompt, max_tokens=max_tokens, temperature=temperature, top_k=top_k, top_p=top_p, seed=seed)
        )
        return 0
