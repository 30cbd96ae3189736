"""An agent that asks for its turns itself, at an endpoint."""

import json
import urllib.request


def run(task, *, base_url, api_key, model):
    messages, number, reward = [{"role": "user", "content": task.prompt}], int(task.label), 0.0
    headers = {"content-type": "application/json", "authorization": f"Bearer {api_key}"}
    for _ in range(3):
        body = json.dumps({"model": model, "messages": messages}).encode()
        with urllib.request.urlopen(
            urllib.request.Request(f"{base_url}/chat/completions", body, headers), timeout=60
        ) as reply:
            answer = json.load(reply)["choices"][0]["message"]
        guess = int(answer["content"]) if answer["content"].isdigit() else 0
        reward += 1 - abs(guess - number) / 8
        if guess == number:
            break
        messages += [answer, {"role": "user", "content": "higher" if guess < number else "lower"}]
    return {"reward": reward, "guesses": len(messages) // 2 + 1}
