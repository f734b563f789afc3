import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.ByteArrayOutputStream;
import java.io.IOException;
import java.net.URI;
import java.net.http.HttpClient;
import java.net.http.HttpRequest;
import java.net.http.HttpResponse.BodyHandlers;
import java.nio.ByteBuffer;
import java.util.Map;
import org.apache.avro.Schema;
import org.apache.avro.generic.GenericData;
import org.apache.avro.generic.GenericDatumWriter;
import org.apache.avro.generic.GenericRecord;
import org.apache.avro.generic.GenericRecordBuilder;
import org.apache.avro.io.BinaryEncoder;
import org.apache.avro.io.EncoderFactory;
import org.apache.kafka.clients.producer.KafkaProducer;
import org.apache.kafka.clients.producer.ProducerRecord;
import org.apache.kafka.common.serialization.ByteArraySerializer;
import org.apache.kafka.common.serialization.StringSerializer;

/**
 * Sends a conversation whose turns carry a field of the sender's own, {@code mood}.
 *
 * <p>Arguments: bootstrap servers, URL of the schema registry, topic, session id. Needs
 * kafka-clients and avro alone. With Confluent's KafkaAvroSerializer, {@link #write} and
 * {@link #register} are not needed: give it the record.
 */
public final class SendTurns {
    private static final ObjectMapper JSON = new ObjectMapper();
    private static final HttpClient HTTP = HttpClient.newHttpClient();

    public static void main(String[] arguments) throws Exception {
        String topic = arguments[2];
        String session = arguments[3];
        String versions = arguments[1] + "/subjects/" + topic + "-value/versions";

        String text = withMood(ask(HttpRequest.newBuilder(URI.create(versions + "/latest")))
                .get("schema").asText());
        Schema schema = new Schema.Parser().parse(text);
        int id = register(versions, text);

        // The default partitioner is the right one: a session's turns and feedback meet on one
        // partition.
        Map<String, Object> config = Map.of("bootstrap.servers", arguments[0], "acks", "all");
        try (var producer =
                new KafkaProducer<>(config, new StringSerializer(), new ByteArraySerializer())) {
            for (GenericRecord turn : new GenericRecord[] {
                turn(schema, session, "user", "What should I read next?").set("mood", "curious").build(),
                turn(schema, session, "assistant", "Something short.").set("session_done", true).build()
            }) {
                producer.send(new ProducerRecord<>(topic, session, write(turn, id))).get();
            }
        }
    }

    /** The schema with the field, optional and with a default: all others go on reading and writing. */
    private static String withMood(String text) throws IOException {
        ObjectNode schema = (ObjectNode) JSON.readTree(text);
        ArrayNode fields = (ArrayNode) schema.get("fields");
        for (JsonNode field : fields) {
            if (field.get("name").asText().equals("mood")) {
                return text;
            }
        }
        fields.add(JSON.readTree(
                "{\"name\": \"mood\", \"type\": [\"null\", \"string\"], \"default\": null,"
                        + " \"doc\": \"The user's mood.\"}"));
        return JSON.writeValueAsString(schema);
    }

    /** A turn; what is not set takes the defaults of the schema. */
    private static GenericRecordBuilder turn(
            Schema schema, String session, String role, String content) {
        return new GenericRecordBuilder(schema)
                .set("event_id", session + "-" + role)
                .set("session_id", session)
                .set("turn_id", session + "-" + role)
                .set("role", new GenericData.EnumSymbol(schema.getField("role").schema(), role))
                .set("content", content)
                .set("event_time", System.currentTimeMillis())
                .set("source", "my-front-end");
    }

    /** Registers the schema; its id. The registry refuses one that is not FULL_TRANSITIVE. */
    private static int register(String versions, String text) throws Exception {
        String body = JSON.writeValueAsString(Map.of("schema", text));
        return ask(HttpRequest.newBuilder(URI.create(versions))
                .header("Content-Type", "application/vnd.schemaregistry.v1+json")
                .POST(HttpRequest.BodyPublishers.ofString(body))).get("id").asInt();
    }

    /** The wire form of schema registries: a zero, the schema's id, the Avro body. */
    private static byte[] write(GenericRecord record, int id) throws IOException {
        ByteArrayOutputStream out = new ByteArrayOutputStream();
        out.write(0);
        out.write(ByteBuffer.allocate(Integer.BYTES).putInt(id).array());
        BinaryEncoder encoder = EncoderFactory.get().binaryEncoder(out, null);
        new GenericDatumWriter<GenericRecord>(record.getSchema()).write(record, encoder);
        encoder.flush();
        return out.toByteArray();
    }

    private static JsonNode ask(HttpRequest.Builder request) throws Exception {
        var answer = HTTP.send(request.build(), BodyHandlers.ofString());
        if (answer.statusCode() != 200) {
            throw new IOException("the schema registry answered " + answer.body());
        }
        return JSON.readTree(answer.body());
    }
}
