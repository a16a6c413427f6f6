"""Models as oracles: behind an OpenAI-compatible address, or a Hugging Face folder, greedy either way.

Answers are remembered for the process, so that a question has one answer, as the snapshots need it.
"""

import asyncio
import threading
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

from verl_multiturn.errors import unknown

MOST_TOKENS = 64  # of an answer; the authors' oracles: 16 (things), 64 (cities)
REMEMBERED = 100_000  # answers
SECONDS = 10.0  # for one answer: all attempts end before multiturn.step_timeout, and so say what came
Ask = Callable[[str, str, str], str]  # prompt template, hidden name, question -> what the model said


def oracle_of(name: str) -> Ask | None:
    """The oracle of a name; None: "rules", the game's own table.

    Args:
        name: "rules", "http://host:port/v1#model", or the folder of a model with its tokenizer.

    Raises:
        ValueError: none of these, nobody answers at the address, or the model cannot be loaded.
    """
    return None if name == "rules" else _model(name)


@lru_cache
def _model(name: str) -> Ask:
    if "://" in name:
        complete = _endpoint(name)
    elif Path(name).expanduser().is_dir():
        complete = _local(str(Path(name).expanduser()))
    else:
        raise unknown(
            "oracle", name, ["rules"], "Or an address such as http://host:8000/v1#model, or a model's folder."
        )

    @lru_cache(maxsize=REMEMBERED)
    def ask(prompt: str, hidden: str, question: str) -> str:
        return complete(prompt.format(name=hidden, question=question))

    return ask


def _endpoint(address: str) -> Callable[[str], str]:
    from verl_multiturn.endpoint import Endpoint

    endpoint = Endpoint(address, {"temperature": 0.0}, timeout=SECONDS)
    # One loop for all threads that play: the connections of a client belong to its loop.
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="oracle", daemon=True).start()

    async def answer(text: str) -> str:
        chat = endpoint.chat().build_initial_tokens([{"role": "user", "content": text}])
        sample = await endpoint(chat, MOST_TOKENS, None)
        return endpoint.decode(sample.ids)

    return lambda text: asyncio.run_coroutine_threadsafe(answer(text), loop).result()


def _local(folder: str) -> Callable[[str], str]:
    """A model of transformers: one that continues a chat or a text, or (T5) one that answers a text."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForSeq2SeqLM, AutoTokenizer

    try:
        tokens: Any = AutoTokenizer.from_pretrained(folder)
        whole = bool(AutoConfig.from_pretrained(folder).is_encoder_decoder)
        model: Any = (AutoModelForSeq2SeqLM if whole else AutoModelForCausalLM).from_pretrained(folder)
    # For broken files transformers raises whatever its parts raise.
    except Exception as error:
        why = " ".join(str(error).split())[:300]
        raise ValueError(f"cannot load the oracle in {folder}: {why}") from error
    model.to("cuda" if torch.cuda.is_available() else "cpu").eval()
    lock = threading.Lock()  # one model for all threads that play

    def answer(text: str) -> str:
        if not whole and tokens.chat_template is not None:
            chat = [{"role": "user", "content": text}]
            text = tokens.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
        inputs = tokens(text, return_tensors="pt", add_special_tokens=whole or tokens.chat_template is None)
        ids = inputs["input_ids"].to(model.device)
        mask = inputs["attention_mask"].to(model.device)
        with lock, torch.inference_mode():
            out = model.generate(
                input_ids=ids, attention_mask=mask, max_new_tokens=MOST_TOKENS, do_sample=False
            )
        return str(tokens.decode(out[0] if whole else out[0, ids.shape[1] :], skip_special_tokens=True))

    return answer
