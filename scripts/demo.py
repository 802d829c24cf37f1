"""A live page: type a sentence, get the best outputs, and see the model think. Needs no network."""

if __name__ == "__main__":
    import environment

    environment.prepare()  # before torch is loaded

import argparse
import os
import sys
from collections.abc import Sequence
from typing import Any

# Before it is imported: it would ask its makers' server for a newer version.
os.environ["GRADIO_ANALYTICS_ENABLED"] = "False"

from transformers.utils import logging

from modeling_tinytfm.decoding import Hypothesis
from modeling_tinytfm.explorer import Trace
from modeling_tinytfm.loading import load_model
from modeling_tinytfm.seeing import look
from modeling_tinytfm.translation import translate_n_best


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line and serves until Ctrl-C; returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("model", help="a folder that train.py made, or a name on the Hub")
    parser.add_argument("--text", default="", help="what is typed in to begin with")
    parser.add_argument("--port", type=int, help="(default: the first free one from 7860)")
    options = parser.parse_args(argv)
    logging.disable_progress_bar()  # the one of loading weights
    try:
        app, theme = make_app(*load_model(options.model), options.text)
        app.launch(server_port=options.port, theme=theme, footer_links=[], ssr_mode=False)
    except (ImportError, ValueError, OSError) as error:
        print(f"demo.py: {' '.join(str(error).split())}", file=sys.stderr)
        return 2
    return 0


def translate_and_look(
    model: Any, tokenizer: Any, text: str, n_best: int
) -> tuple[list[Hypothesis], Trace]:
    """The best outputs, and the trace of the first of them: one search, so wide, finds both."""
    num_beams = max(n_best, model.generation_config.num_beams or 1)
    settings: dict[str, Any] = {"num_beams": num_beams, "do_sample": False}
    (best,) = translate_n_best(model, tokenizer, [text], n_best, **settings)
    return best, look(model, tokenizer, text, num_beams=num_beams)


def make_app(model: Any, tokenizer: Any, text: str) -> tuple[Any, Any]:
    """The app and its theme, whose fonts are the machine's own."""
    try:
        import gradio
    except ImportError as error:
        raise ImportError("gradio is missing: pip install -e '.[demo]'") from error

    def answer(text: str, n_best: int) -> tuple[list[list[Any]], str]:
        try:
            best, trace = translate_and_look(model, tokenizer, text, n_best)
        except ValueError as error:
            raise gradio.Error(str(error), print_exception=False) from error
        rows = [[hypothesis.text, round(hypothesis.score, 4)] for hypothesis in best]
        return rows, trace._repr_html_()

    with gradio.Blocks(title="TinyTFM", analytics_enabled=False) as app:
        with gradio.Row():
            source = gradio.Textbox(text, label="Source", scale=4)
            number = gradio.Slider(1, 10, 4, step=1, label="Outputs", scale=1)
        button = gradio.Button("Translate and look", variant="primary")
        outputs = gradio.Dataframe(headers=["Output", "Score"], label="Best first")
        page = gradio.HTML()
        for event in (source.submit, button.click):
            event(answer, [source, number], [outputs, page])
    font, font_mono = ["system-ui", "sans-serif"], ["ui-monospace", "monospace"]
    return app, gradio.themes.Default(font=font, font_mono=font_mono)


if __name__ == "__main__":
    sys.exit(main())
