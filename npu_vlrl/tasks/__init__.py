"""Tasks, each with its data, reward, demonstrations and starting configuration in one module or folder.

`registry.py` enters their names. A module holds, by the table that names it:

GENERATORS  `generated(config, seed, unit) -> Callable[[int], Task]`: the task of each index, by `seed` and index alone;
            `unit` is the side in pixels of the square that is one image token
            `demonstration(task, config, rng, opened, form) -> Iterable[str]`: what a demonstrator says in an episode,
            for the warm start; `opened`: the chat template opens a thought, which is ended first; `form`: how calls of
            tools are written
GAMES       `game(**options) -> Game`, see `workflow/environments/game.py`; its `solution` is the demonstration
RULES       `score(answer, text, **options) -> Verdict` and `check_gold(answer, **options)`
            `INLINE = True` where both take time linear in the text, so that they need no process of their own
            `LOWEST`: the lowest reward, where that is below 0
DATA        `HELP`, `add(parser)` for the arguments, and `run(options) -> Iterable[str]`, which writes the data and
            yields the lines to show; importing it must be fast
STARTERS    `STARTER`: settings by dotted key, and `PREPARE`: the command that makes the data, or None
"""
