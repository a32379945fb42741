"""Messages that are logged while a bar is shown."""

import contextlib
import logging

import pytest
from tqdm import tqdm
from transformers import TrainerCallback

from hf_infcl.trainer.messages import above_the_bars
from tests.trainer.helpers import Rows, trainer


def shown_lines(console):
    """The lines as a terminal shows them: what follows a carriage return overwrites what stood there."""
    return [line.split("\r")[-1] for line in console.readouterr().err.split("\n")]


@contextlib.contextmanager
def bare_root():
    """A root logger as Python starts with, on which pytest has put handlers."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(logging.root, "handlers", [])
        yield


def test_a_message_stands_on_a_line_of_its_own(capsys):
    with bare_root(), above_the_bars(), tqdm(total=2) as bar:
        bar.update()
        logging.getLogger("hf_infcl.test").warning("said")
    assert "said" in shown_lines(capsys)


def test_handlers_keep_their_level_and_their_form_and_are_as_before_afterwards(capsys):
    logger = logging.getLogger("hf_infcl.test_levels")
    handler = logging.StreamHandler()
    handler.setLevel(logging.ERROR)
    handler.setFormatter(logging.Formatter("<%(message)s>"))
    logger.addHandler(handler)
    try:
        with bare_root(), above_the_bars(), above_the_bars():
            logger.warning("quiet")
            logger.error("loud")
        with bare_root():
            logger.error("later")
    finally:
        logger.removeHandler(handler)
    assert capsys.readouterr().err.split() == ["<loud>", "<later>"]
    assert handler.emit.__func__ is logging.StreamHandler.emit


class Saying(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        logging.getLogger("hf_infcl.test").warning("after step %d", state.global_step)

    def on_prediction_step(self, args, state, control, **kwargs):
        logging.getLogger("hf_infcl.test").warning("evaluating")


def test_training_and_evaluating_keep_messages_off_their_bars(tmp_path, capsys):
    run = trainer(tmp_path, callbacks=[Saying()], eval_dataset=Rows(4), disable_tqdm=False)
    with bare_root():
        run.train()
        run.evaluate()
        run.predict(Rows(4))
    lines = shown_lines(capsys)
    for said, times in (("after step 1", 1), ("after step 2", 1), ("evaluating", 2)):
        assert lines.count(said) == times
