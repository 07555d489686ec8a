// Three turns with the AI SDK: blocking, streamed after `previousResponseId`, and with the history given back.
// usage: node ai-sdk.mjs BASE_URL; prints what came back, as JSON.
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, streamText } from "ai";

const [baseURL] = process.argv.slice(2);
const openai = createOpenAI({ baseURL, apiKey: "none" });
const tools = { code_interpreter: openai.tools.codeInterpreter({}) };
const model = openai.responses("scripted");
const settings = { model, tools, maxRetries: 0 };

const first = await generateText({ ...settings, prompt: "Square" });
const { responseId } = first.providerMetadata.openai;
const [cited] = first.sources.map((source) => source.providerMetadata.openai);
const place = `${baseURL}/containers/${cited.containerId}/files/${cited.fileId}/content`;
const file = await (await fetch(place)).text();

const parts = [];
let text = "";
const streamed = streamText({
  ...settings,
  prompt: "Add",
  providerOptions: { openai: { previousResponseId: responseId } },
});
for await (const part of streamed.stream) {
  if (part.type === "error") throw part.error;
  if (part.type === "text-delta") text += part.text;
  parts.push(part.type);
}

const question = { role: "user", content: "Square" };
const messages = [question, ...first.response.messages, { role: "user", content: "Add" }];
const third = await generateText({ ...settings, messages });
const unkept = { openai: { store: false } };
const fourth = await generateText({ ...settings, messages, providerOptions: unkept });

const texts = [first.text, text, third.text, fourth.text];
console.log(JSON.stringify({ texts, parts, file, calls: [first, third, fourth].map((turn) => turn.toolResults) }));
