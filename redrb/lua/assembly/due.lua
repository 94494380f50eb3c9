-- Drop groups without enough parts at the age limit, or return one that the caller is to put or to bury.
-- KEYS[1] stream
-- ARGV    the call `FindDue` of redrb/stream/assembly/calls.py
-- Returns its reply
--@include task clock facts waking parts permissions

check_permissions(KEYS[1])
begin_writing()
if not rules().exists then
  return cmsgpack.pack({dropped = 0})
end
local ask = cmsgpack.unpack(ARGV[1])
local now, dropped, rights, found = set_clock(), 0, false
local over = redis.call('ZRANGEBYSCORE', key('part_due'), '-inf', string.format('%.0f', now), 'LIMIT', 0,
  PAGE.parts_dropped)
for _, name in ipairs(over) do
  local record = record_of(name)
  if record.whole or record.bury or record.count >= record.least then
    redis.call('ZADD', key('part_due'), string.format('%.0f', now + ask.grace_ms), name)
    record.key, record.over, found = name, now >= record.ends, record
    break
  end
  end_parts(name, record, 'dropped', '')
  dropped = dropped + 1
  if record.right then
    --@include held_rights
    return_right(record.series, record.right)
    rights = true
  end
end
if rights then
  wake_makers(now)
end
return cmsgpack.pack({dropped = dropped, parts = found})
