-- Count the part of a group that the same transaction has just stored, or remove it again.
-- Runs in MULTI after HSETNX part_blobs <index and key> <part>. After the last part the caller puts the
-- group.
-- KEYS[1] stream
-- ARGV    the call `AddPart` of redrb/stream/assembly/calls.py
-- Returns its reply. Repeated, it counts nothing a second time.
--@include task clock facts parts

local ask = cmsgpack.unpack(ARGV[1])
local part, right = ask.part, ask.right
if redis.call('HEXISTS', key('part_records'), part.key) == 0 then
  --@include permissions
  check_permissions(stream)
end
begin_writing()
local name, index, of, least, bury, kind = part.key, part.index, part.of, part.least, part.bury, ask.kind
local rule, field = rules(), blob_field(index, name)
local now = now_ms()
local record = record_of(name)
local known = record and string.byte(record.have, index + 1) == 49

local function is_due()
  local over = string.format('%.0f', now)
  return #redis.call('ZRANGEBYSCORE', key('part_due'), '-inf', over, 'LIMIT', 0, 1) > 0
end

local function refuse(reply)
  if not known then
    redis.call('HDEL', key('part_blobs'), field)
  end
  return cmsgpack.pack(reply)
end

if not rule.exists or rule.incarnation ~= ask.incarnation then
  return refuse({outcome = 'gone'})
elseif not record then
  local id = redis.call('HGET', key('part_ends'), name)
  if id then
    add(key('parts'), 'late', 1)
    return refuse({outcome = 'ended', due = is_due(), group = id ~= '' and id or nil})
  elseif redis.call('ZCARD', key('part_due')) >= part.most then
    return refuse({outcome = 'full', due = is_due()})
  end
  record = {of = of, least = least, bury = bury, kind = kind, have = string.rep('0', of), count = 0,
    bytes = 0, whole = false, ends = now + part.age_ms}
elseif record.of ~= of or record.least ~= least or record.bury ~= bury
  or kind ~= '' and record.kind ~= '' and kind ~= record.kind then
  return refuse({outcome = 'differs', parts = record})
end
if rule.order == 'admission' and right == '' and not record.right then
  return refuse({outcome = 'unadmitted'})
end

set_clock()
if known then
  add(key('parts'), 'repeated', 1)
else
  if record.count == 0 then
    add(key('parts'), 'begun', 1)
    redis.call('ZADD', key('part_due'), string.format('%.0f', record.ends), name)
  end
  local size = redis.call('HSTRLEN', key('part_blobs'), field)
  record.have = string.sub(record.have, 1, index) .. '1' .. string.sub(record.have, index + 2)
  record.count, record.bytes = record.count + 1, record.bytes + size
  record.priority, record.tags = ask.priority or record.priority, record.tags or ask.tags
  add(key('parts'), 'waiting', 1)
  add(key('parts'), 'bytes', size)
  if record.count == record.of then
    record.whole = true
    redis.call('ZADD', key('part_due'), string.format('%.0f', now + ask.grace_ms), name)
  end
end
if right ~= '' and not record.right then
  --@include held_rights
  record.series, record.right = ask.series, right
  keep_right(record.series, right, '#parts/0')
end
redis.call('HSET', key('part_records'), name, cmsgpack.pack(record))
record.key = name
return cmsgpack.pack({outcome = record.whole and 'whole' or 'waits', due = is_due(),
  keeps_right = right ~= '' and record.right == right and record.series == ask.series,
  parts = record.whole and record or nil})
