import java.io.ByteArrayInputStream;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.stream.Collectors;

/** Posts the JSON in a file as Java's standard client does by default, with a length, in chunks, after Expect. */
class Post {
    public static void main(String[] arguments) throws Exception {
        URI address = URI.create(arguments[0]);
        byte[] body = Files.readAllBytes(Path.of(arguments[1]));
        HttpClient client = HttpClient.newHttpClient();
        for (String way : new String[] {"length", "chunks", "expect", "lines"}) {
            HttpRequest.BodyPublisher publisher =
                    way.equals("chunks")
                            ? HttpRequest.BodyPublishers.ofInputStream(() -> new ByteArrayInputStream(body))
                            : HttpRequest.BodyPublishers.ofByteArray(body);
            HttpRequest request =
                    HttpRequest.newBuilder(address)
                            .header("Content-Type", "application/json")
                            .expectContinue(way.equals("expect"))
                            .POST(publisher)
                            .build();
            String answer;
            int status;
            if (way.equals("lines")) {
                HttpResponse<java.util.stream.Stream<String>> lines =
                        client.send(request, HttpResponse.BodyHandlers.ofLines());
                status = lines.statusCode();
                answer = lines.body().collect(Collectors.joining("\n"));
            } else {
                HttpResponse<String> whole = client.send(request, HttpResponse.BodyHandlers.ofString());
                status = whole.statusCode();
                answer = whole.body();
            }
            System.out.println(way + " " + status + " " + answer.replace("\n", "|"));
        }
    }
}
