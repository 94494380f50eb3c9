-- The records of rows, packed: {head, segment, ...}.
--
-- A segment is what one put has stored of a row: {token, place, bucket, change, id, bytes, ...}; its parts
-- are named in redrb/lua/records.py. Its value is the string <owner>:<bucket>}:<token>:<place>, perhaps on
-- another node: the columns follow each other in it. The id of a column that another put has replaced is 0.
--
-- The head is the text "<change of the first put> <columns>". The change is that of the put's first row: it
-- is compared with marks only, and none lies within a put. Each character of the columns stands for six: a
-- bit is set for each column that the row has. So a put of new columns need not unpack what the puts before
-- it have stored.

-- The two parts of a head: the change with the space behind it, and the columns.
local function parts_of_head(head)
  local first, had = string.match(head, '^(%d+ )([0-o]*)$')
  if not first then
    error({err = 'ERR the record of a row is damaged'})
  end
  return first, had
end

-- The head of a packed record, how many elements it has, and the place behind the head.
local function divided(packed)
  local kind, at = string.byte(packed, 1) or 0, 2
  local count = kind - 144
  if kind == 220 then
    local high, low = string.byte(packed, 2, 3)
    count, at = high * 256 + low, 4
  end
  local length = string.byte(packed, at) or 0
  if length == 217 then
    at, length = at + 1, string.byte(packed, at + 1) + 160
  end
  if kind ~= 220 and (count < 1 or count > 15) then
    error({err = 'ERR the record of a row is damaged'})
  end
  return string.sub(packed, at + 1, at + length - 160), count, at + length - 160 + 1
end

-- What stands before the elements of a packed array.
local function array_of(count)
  if count < 16 then
    return string.char(144 + count)
  end
  return string.char(220, math.floor(count / 256), count % 256)
end

-- Whether columns have one.
local function has_column(had, id)
  local bits = string.byte(had, math.floor(id / 6) + 1)
  return bits and math.floor((bits - 48) / 2 ^ (id % 6)) % 2 == 1
end

-- Columns with further ones.
local function with_columns(had, ids)
  local bits = {string.byte(had, 1, -1)}
  for _, id in ipairs(ids) do
    local at = math.floor(id / 6) + 1
    for between = #bits + 1, at do -- bound: PAGE.columns
      bits[between] = 48
    end
    if math.floor((bits[at] - 48) / 2 ^ (id % 6)) % 2 == 0 then
      bits[at] = bits[at] + 2 ^ (id % 6)
    end
  end
  return string.char(unpack(bits))
end

-- Bytes of the columns of a segment.
local function bytes_of_segment(segment)
  local bytes = 0
  for at = SEGMENT.cells + 1, #segment, 2 do
    bytes = bytes + segment[at]
  end
  return bytes
end

-- Give a record, which has other segments now, its head.
local function set_head(record)
  local ids = {}
  for at = 2, #record do -- bound: puts of a row
    for field = SEGMENT.cells, #record[at], 2 do -- bound: PAGE.columns
      ids[#ids + 1] = record[at][field] > 0 and record[at][field] or nil
    end
  end
  local first = parts_of_head(record[1])
  record[1] = first .. with_columns('', ids)
end
