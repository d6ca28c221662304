// Everything that the official client does, against the server of argv[2]; prints what came back as JSON.
import { Ollama } from "ollama";

const [url, image] = process.argv.slice(2);
const client = new Ollama({ host: url });
const model = "demo";
const user = (content, more = {}) => [{ role: "user", content, ...more }];
const tools = [
  {
    type: "function",
    function: {
      name: "get_weather",
      description: "The weather in a city",
      parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
    },
  },
];
const schema = {
  type: "object",
  properties: { name: { type: "string" }, people: { type: "integer" } },
  required: ["name", "people"],
};

async function streamed(messages, more = {}) {
  const found = { text: "", thinking: "", calls: [], pieces: 0 };
  for await (const part of await client.chat({ model, messages, stream: true, ...more })) {
    found.pieces += 1;
    found.text += part.message.content;
    found.thinking += part.message.thinking ?? "";
    found.calls.push(...(part.message.tool_calls ?? []).map((call) => [call.function.name, call.function.arguments]));
  }
  return found;
}

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return { status: error.status_code ?? null, message: error.message };
  }
  return null;
}

const question = user("one tool");
const asked = await client.chat({ model, messages: question, tools });
const answered = await client.chat({
  model,
  messages: [...question, asked.message, { role: "tool", tool_name: "get_weather", content: "sunny" }],
  tools,
});
console.log(
  JSON.stringify({
    stream: await streamed(user("text")),
    thinking: await streamed(user("thinking"), { think: true }),
    tools: await streamed(question, { tools }),
    answer: answered.message.content,
    schema: JSON.parse((await client.chat({ model, messages: user("Rome, please"), format: schema })).message.content),
    image: (await client.chat({ model, messages: user("text", { images: [image] }) })).message.content,
    missing: await failure(() => client.chat({ model: "nobody", messages: user("text") })),
    broken: await failure(() => client.chat({ model, messages: user("error before") })),
    interrupted: await failure(() => streamed(user("error during"))),
  }),
);
