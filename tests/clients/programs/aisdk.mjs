// Everything that the AI SDK does with one of its providers, against the server of argv[3]; prints what came back as JSON.
import { createAnthropic } from "@ai-sdk/anthropic";
import { createGoogle } from "@ai-sdk/google";
import { createOpenAI } from "@ai-sdk/openai";
import { createOpenAICompatible } from "@ai-sdk/openai-compatible";
import { generateText, isStepCount, Output, streamText, tool } from "ai";
import { z } from "zod";

const [provider, url, image] = process.argv.slice(2);
const settings = { apiKey: "any", baseURL: `${url}/v1` };
const openai = createOpenAI(settings);
const models = {
  responses: (name) => openai(name),
  chat: (name) => openai.chat(name),
  messages: (name) => createAnthropic(settings)(name),
  gemini: (name) => createGoogle({ ...settings, baseURL: `${url}/v1beta` })(name),
  compatible: (name) =>
    createOpenAICompatible({ ...settings, name: "modelyard", supportsStructuredOutputs: true })(name),
};
const providerOptions = {
  openai: { reasoningSummary: "auto", forceReasoning: true },
  anthropic: { thinking: { type: "enabled", budgetTokens: 1024 } },
  google: { thinkingConfig: { includeThoughts: true } },
};
const model = models[provider]("demo");
const common = { model, maxRetries: 0, maxOutputTokens: 2000 };
const describe = { description: "The weather in a city", inputSchema: z.object({ city: z.string() }) };
const tools = { get_weather: tool(describe) };
const run = { get_weather: tool({ ...describe, execute: async () => "sunny" }) };

async function streamed(prompt, options = {}) {
  const found = { text: "", thinking: "", calls: [], pieces: 0 };
  for await (const part of streamText({ ...common, prompt, onError: () => {}, ...options }).fullStream) {
    if (part.type === "error") throw part.error;
    found.pieces += 1;
    if (part.type === "text-delta") found.text += part.text;
    if (part.type === "reasoning-delta") found.thinking += part.text;
    if (part.type === "tool-call") found.calls.push([part.toolName, part.input]);
  }
  return found;
}

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return { status: error.statusCode ?? null, message: error.message ?? JSON.stringify(error) };
  }
  return null;
}

// Three turns in one conversation: the SDK sends back what it received, reasoning and calls included.
const first = [{ role: "user", content: "thinking" }];
const thought = await generateText({ ...common, messages: first, providerOptions });
const second = [...first, ...thought.response.messages, { role: "user", content: "one tool" }];
const called = await generateText({ ...common, messages: second, tools: run, stopWhen: isStepCount(3), providerOptions });
const third = [...second, ...called.response.messages, { role: "user", content: "text" }];
const last = await generateText({ ...common, messages: third, tools, providerOptions });

const schema = z.object({ name: z.string(), people: z.number().int() });
const seen = [
  { type: "text", text: "text" },
  { type: "file", data: image, mediaType: "image/png" },
];
console.log(
  JSON.stringify({
    stream: await streamed("text"),
    thinking: await streamed("thinking", { providerOptions }),
    tools: await streamed("one tool", { tools }),
    answer: called.text,
    last: last.text,
    schema: (await generateText({ ...common, prompt: "Rome, please", output: Output.object({ schema }) })).output,
    image: (await generateText({ ...common, messages: [{ role: "user", content: seen }] })).text,
    missing: await failure(() => generateText({ ...common, model: models[provider]("nobody"), prompt: "text" })),
    broken: await failure(() => generateText({ ...common, prompt: "error before" })),
    interrupted: await failure(() => streamed("error during")),
  }),
);
