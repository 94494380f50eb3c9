-- Add columns and tags to rows; their values were stored before.
-- KEYS[1] stream
-- ARGV    the call `Put` of redrb/table/calls.py; then, with tags, the packed tags of each row
-- Returns its reply. Repeated, it changes nothing more.
--@include task table records writes

local ask = cmsgpack.unpack(ARGV[1])
local answer = answer_without(ask)
if answer then
  return cmsgpack.pack(answer)
end
if redis.call('HEXISTS', puts, ask.writer) == 0 then
  --@include permissions
  check_permissions(KEYS[1])
end
local numbered, added = replies_of('HMGET', keys, ask.keys), 0
for _, row in ipairs(numbered) do
  added = added + (row and 0 or 1)
end
if #ask.columns > 0 or added == 0 then -- new rows of tags alone are refused at the memory limit
  begin_writing()
end
if added > 0 then -- puts that add no row are let in: others may wait for these columns
  local left, bytes = table_room()
  if left >= 0 or bytes >= 0 then
    --@include clock waiters
    local now, most = now_ms(), numbers(task, 'limit', 'max_bytes')
    if most[1] > 0 and added > most[1] or most[2] > 0 and ask.nbytes > most[2] then
      return cmsgpack.pack({outcome = 'never'})
    end
    if bytes >= 0 and ask.nbytes > bytes
      or left >= 0 and left - added < reserved_before('#room', ask.writer, now, left - added, added) then
      if ask.ttl_ms > 0 then
        enqueue('#room', ask.writer, added, ask.ttl_ms, now)
      else
        dequeue('#room', ask.writer)
      end
      return cmsgpack.pack({outcome = 'full'})
    end
    dequeue('#room', ask.writer)
  end
end

local ids, new = column_ids(), {}
local known = redis.call('HLEN', columns)
for _, name in ipairs(ask.columns) do
  if not ids[name] then
    known = known + 1
    if known > PAGE.columns then
      return cmsgpack.pack({outcome = 'columns'})
    end
    ids[name] = known
    new[#new + 1], new[#new + 2] = name, known
  end
end
local packed_tags, given_tags = #ARGV > 1 and of_rows(tags, numbered) or {}, {}
local largest = 1
for i = 1, #ARGV - 1 do -- bound: PAGE.put_rows
  local given = ARGV[1 + i]
  if packed_tags[i] then
    local merged = cmsgpack.unpack(packed_tags[i])
    for tag, value in pairs(cmsgpack.unpack(given)) do
      merged[tag] = value
    end
    given = cmsgpack.pack(merged)
  end
  given_tags[i] = given
  largest = #given > #given_tags[largest] and i or largest
end
if #(given_tags[largest] or '') > ask.most_tags then
  return cmsgpack.pack({outcome = 'tags', count = largest - 1, nbytes = #given_tags[largest]})
end
local count, width = #ask.keys, #ask.columns
local change = next_changes(count)
local last = number(task, 'number')
local stored_keys, stored_rows, stored_tags, changed, replaced = {}, {}, {}, {}, {}
local packed_rows = width > 0 and of_rows(rows, numbered) or {}
local written, all = {}, {}
for i = 1, width do -- bound: PAGE.columns
  all[i] = ids[ask.columns[i]]
  written[all[i]] = true
end

-- Columns with those of this put, and whether one of these is there already.
local joined, replacing = {}, {}
local function joined_with(had)
  if not joined[had] then
    joined[had], replacing[had] = with_columns(had, all), false
    for _, id in ipairs(all) do
      replacing[had] = replacing[had] or has_column(had, id)
    end
  end
  return joined[had], replacing[had]
end

-- Mark the columns of a record as replaced that this put writes.
local function replace(record)
  for at = #record, 2, -1 do -- bound: puts of a row
    local segment, left = record[at], false
    for field = SEGMENT.cells, #segment, 2 do
      if written[segment[field]] then
        segment[field] = 0
      end
      left = left or segment[field] ~= 0
    end
    if not left then
      ask.nbytes = ask.nbytes - bytes_of_segment(segment)
      replaced[#replaced + 1] = value_of(segment)
      table.remove(record, at)
    end
  end
end

-- Add a segment to a packed record. Returns the record, and the columns that it has.
local function append(packed, segment)
  local head, elements, behind = divided(packed)
  local first, had = parts_of_head(head)
  local has, replaces = joined_with(had)
  if replaces then
    local record = cmsgpack.unpack(packed)
    replace(record)
    record[1], record[#record + 1] = first .. has, segment
    return cmsgpack.pack(record), has
  end
  return array_of(elements + 1) .. cmsgpack.pack(first .. has) .. string.sub(packed, behind)
    .. cmsgpack.pack(segment), has
end

local having, mine = {}, with_columns('', all) -- the columns that each row has now; those of a new one
local new_head = string.format('%.0f ', change + 1) .. mine
for i, name in ipairs(ask.keys) do
  local is_new, packed = not numbered[i], packed_rows[i]
  if is_new then
    last = last + 1
    numbered[i] = last
    stored_keys[#stored_keys + 1], stored_keys[#stored_keys + 2] = name, last
  end
  if is_new or width > 0 then
    local segment
    if width > 0 then
      segment = {[SEGMENT.token] = ask.token, [SEGMENT.place] = i - 1, [SEGMENT.bucket] = ask.buckets[i],
        [SEGMENT.change] = change + i}
      for field = 1, width do -- bound: PAGE.columns
        segment[SEGMENT.cells + 2 * field - 2] = all[field]
        segment[SEGMENT.cells + 2 * field - 1] = ask.sizes[(i - 1) * width + field]
      end
    end
    if packed then
      packed, having[i] = append(packed, segment)
    else
      packed = cmsgpack.pack({new_head, segment})
      having[i] = mine
    end
    stored_rows[#stored_rows + 1], stored_rows[#stored_rows + 2] = numbered[i], packed
  end
  changed[2 * i - 1], changed[2 * i] = change + i, numbered[i]
  local given = given_tags[i] or is_new and cmsgpack.pack({[''] = name})
  if given then
    stored_tags[#stored_tags + 1], stored_tags[#stored_tags + 2] = numbered[i], given
  end
end
in_parts('SADD', trash, replaced)
in_parts('HSET', columns, new)
in_parts('HSET', keys, stored_keys)
in_parts('HSET', rows, stored_rows)
in_parts('HSET', tags, stored_tags)
in_parts('ZADD', changes, changed)
redis.call('HSET', task, 'number', string.format('%d', last))
add(task, 'made', added)
add(task, 'bytes', ask.nbytes)
note_done(ask, change + count, count)
if width > 0 and redis.call('EXISTS', key('claims')) == 1 then
  --@include claims
  arrive_everywhere(ids, numbered, ask.keys, having)
end
wake_table(false)
return cmsgpack.pack({outcome = 'ok', change = change + count, count = count,
  trash = redis.call('EXISTS', trash) == 1})
