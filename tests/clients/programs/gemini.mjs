// Everything that the official client does, against the server of argv[2]; prints what came back as JSON.
import { GoogleGenAI } from "@google/genai";

const [url, image] = process.argv.slice(2);
const client = new GoogleGenAI({ apiKey: "any", httpOptions: { baseUrl: url } });
const model = "demo";
const functionDeclarations = [
  {
    name: "get_weather",
    description: "The weather in a city",
    parameters: { type: "OBJECT", properties: { city: { type: "STRING" } }, required: ["city"] },
  },
];
const tools = [{ functionDeclarations }];
const schema = {
  type: "OBJECT",
  properties: { name: { type: "STRING" }, people: { type: "INTEGER" } },
  required: ["name", "people"],
};

async function streamed(contents, config = {}) {
  const found = { text: "", thinking: "", calls: [], pieces: 0 };
  for await (const chunk of await client.models.generateContentStream({ model, contents, config })) {
    found.pieces += 1;
    for (const part of chunk.candidates?.[0]?.content?.parts ?? []) {
      if (part.functionCall) found.calls.push([part.functionCall.name, part.functionCall.args]);
      else if (part.thought) found.thinking += part.text ?? "";
      else found.text += part.text ?? "";
    }
  }
  return found;
}

async function failure(work) {
  try {
    await work();
  } catch (error) {
    return { status: error.status ?? null, message: error.message };
  }
  return null;
}

const chat = client.chats.create({ model, config: { tools } });
const asked = await chat.sendMessage({ message: "one tool" });
const { id, name } = asked.functionCalls[0];
const answered = await chat.sendMessage({ message: [{ functionResponse: { id, name, response: { output: "sunny" } } }] });
const json = { responseMimeType: "application/json", responseSchema: schema };
const seen = [{ text: "text" }, { inlineData: { mimeType: "image/png", data: image } }];
const write = (request) => client.models.generateContent({ model, ...request });
console.log(
  JSON.stringify({
    stream: await streamed("text"),
    thinking: await streamed("thinking", { thinkingConfig: { includeThoughts: true } }),
    tools: await streamed("one tool", { tools }),
    answer: answered.text,
    schema: JSON.parse((await write({ contents: "Rome, please", config: json })).text),
    image: (await write({ contents: [{ role: "user", parts: seen }] })).text,
    missing: await failure(() => write({ model: "nobody", contents: "text" })),
    broken: await failure(() => write({ contents: "error before" })),
    interrupted: await failure(() => streamed("error during")),
  }),
);
