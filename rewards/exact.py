"""1 for an answer that is the text of the column `answer`, 0 for any other. White space at both ends does not count."""


def score(prompts: list, responses: list[str], rows: list[dict]) -> list[float]:
    """One number for each response."""
    return [
        float(response.strip() == str(row["answer"]).strip()) for response, row in zip(responses, rows, strict=True)
    ]
