// npm's `openai` and `ai` (with their OpenAI-compatible and Anthropic providers) against the server at argv[2].
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { generateText, streamText, generateObject, tool } from "ai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { createAnthropic } from "@ai-sdk/anthropic";
import { z } from "zod";

const url = process.argv[2];
const ask = "Write a function that counts words.";
const messages = [{ role: "user", content: ask }];
const Paint = z.object({ n: z.number().int().min(0).max(999), colour: z.enum(["red", "green", "blue"]), ok: z.boolean() });

async function openai() {
  const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
  assert.equal((await client.models.list()).data[0].id, "small");
  const whole = await client.chat.completions.create({ model: "small", messages, max_tokens: 40, temperature: 0 });
  assert.equal(whole.usage.completion_tokens, 40);
  const stream = await client.chat.completions.create({
    model: "small", messages, max_tokens: 40, temperature: 0, stream: true, stream_options: { include_usage: true },
  });
  let text = "", usage = null;
  for await (const chunk of stream) {
    text += chunk.choices[0]?.delta.content ?? "";
    usage = chunk.usage ?? usage;
  }
  assert.equal(text, whole.choices[0].message.content);
  assert.equal(usage.completion_tokens, 40);

  const parsed = await client.chat.completions.parse({
    model: "small", messages, max_tokens: 400, response_format: zodResponseFormat(Paint, "paint"), reasoning_effort: "none",
  });
  Paint.parse(parsed.choices[0].message.parsed);
  const runner = client.chat.completions.stream({
    model: "small", messages, max_tokens: 400, thinking_token_budget: 16, // a small model may reason for long
    tools: [{ type: "function", function: { name: "paint", parameters: z.toJSONSchema(Paint), strict: true } }],
    tool_choice: { type: "function", function: { name: "paint" } },
  });
  const called = await runner.finalChatCompletion();
  assert.equal(called.choices[0].finish_reason, "tool_calls");
  Paint.parse(JSON.parse(called.choices[0].message.tool_calls[0].function.arguments));

  const response = await client.responses.create({ model: "small", input: ask, max_output_tokens: 40, temperature: 0 });
  assert.equal(response.usage.output_tokens, 40);
  const events = await client.responses.create({
    model: "small", input: ask, max_output_tokens: 40, temperature: 0, stream: true,
  });
  let last = null, said = "";
  for await (const event of events) {
    if (event.type === "response.output_text.delta") said += event.delta;
    last = event;
  }
  assert.equal(last.type, "response.incomplete");
  assert.equal(said, response.output_text);
  await assert.rejects(
    client.chat.completions.create({ model: "small", messages, temperature: 1000 }),
    (error) => error instanceof OpenAI.BadRequestError && error.param === "temperature",
  );
}

async function ai(model, named, length, providerOptions) {
  const settings = { model, prompt: ask, maxOutputTokens: length, temperature: 0, maxRetries: 0 };
  const whole = await generateText(settings);
  assert.equal(whole.usage.outputTokens, length, named);
  const streamed = streamText(settings);
  let text = "";
  for await (const piece of streamed.textStream) text += piece;
  assert.equal(text, whole.text, named);
  assert.equal(await streamed.reasoningText, whole.reasoningText, named);

  const called = await generateText({
    model, prompt: ask, maxOutputTokens: 400, maxRetries: 0, providerOptions,
    tools: { paint: tool({ description: "Paints a wall.", inputSchema: Paint }) }, toolChoice: "required",
  });
  assert.equal(called.finishReason, "tool-calls", named);
  Paint.parse(called.toolCalls[0].input);
  const formed = await generateObject({ model, prompt: ask, schema: Paint, maxOutputTokens: 400, maxRetries: 0, providerOptions });
  Paint.parse(formed.object);
}

await openai();
const compatible = createOpenAICompatible({
  name: "legato", baseURL: `${url}/v1`, apiKey: "none", includeUsage: true, supportsStructuredOutputs: true,
});
await ai(compatible("small"), "openai-compatible", 40, { legato: { thinking_token_budget: 16 } });
await ai(createAnthropic({ baseURL: `${url}/v1`, apiKey: "none" })("small"), "anthropic", 12, {});
console.log("ok");
