-- Delete a page of versions, until all are gone; their keys are put into the trash. Current publishers are
-- fenced. The key `fence` stays, so that no token is given twice.
-- KEYS[1] versions
-- ARGV    name
--         name: a new one, which no publisher has; the same for each page
-- Returns {more, last token that was given, deleted version ...}: with more = 1, run it again. Repeated, it
--         deletes versions committed since
--@include weights retention permissions

check_permissions(pins)
begin_writing()
take_over(ARGV[1])
local token = tonumber(redis.call('HGET', fence, 'token') or 0)
local found, reply = redis.call('XRANGE', versions, '-', '+', 'COUNT', PAGE.versions), {}
for i, entry in ipairs(found) do
  reply[i] = tonumber(string.match(entry[1], '^%d+'))
  delete_version(parsed(entry))
end
if #found == PAGE.versions then
  return {1, token, unpack(reply)}
end
discard_attempts()
redis.call('HDEL', fence, 'first')
redis.call('UNLINK', versions, manifests, pins, loads, fulls, prefix .. 'followers')
return {0, token, unpack(reply)}
