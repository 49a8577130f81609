"""Table of units. A row is: symbols | words | bases | number of these bases in one unit.

Symbols are case-sensitive; words are not, and may be in the plural. A name in several rows has several meanings.
"""

from __future__ import annotations

SCALED = """
m | meter metre 米 | m | 1
g | gram gramme 克 | g | 1
L | liter litre 升 | m^3 | 0.001
l | | m^3 | 0.001
s | second sec 秒 | s | 1
W | watt 瓦 | J/s | 1
J | joule 焦耳 焦 | J | 1
N | newton 牛顿 牛 | J/m | 1
Pa | pascal 帕 | J/m^3 | 1
V | volt 伏特 伏 | V | 1
A | ampere amp 安培 安 | A | 1
Hz | hertz 赫兹 | Hz | 1
Ω | ohm 欧姆 | Ω | 1
F | farad | F | 1
C | coulomb | C | 1
mol | mole 摩尔 | mol | 1
cal | calorie | cal | 1
eV | electronvolt | eV | 1
B | byte | B | 1
Wh | watt-hour | J | 3600
"""
"""Units that take the prefixes below."""

PREFIXES = (
    ("n", "nano", "纳", "1e-9"),
    ("u", "micro", "微", "1e-6"),
    ("μ", "micro", "微", "1e-6"),
    ("m", "milli", "毫", "1e-3"),
    ("c", "centi", "厘", "1e-2"),
    ("d", "deci", "分", "1e-1"),
    ("k", "kilo", "千", "1e3"),
    ("M", "mega", "兆", "1e6"),
    ("G", "giga", "吉", "1e9"),
)

PLAIN = """
min | minute 分钟 分 | s | 60
h hr | hour 小时 时 | s | 3600
| day 天 日 | s | 86400
| week 周 | s | 604800
| month 个月 | month | 1
yr | year 年 | month | 12
in " | inch inche 英寸 | m | 0.0254
ft ' | foot feet 英尺 | m | 0.3048
yd | yard 码 | m | 0.9144
mi | mile 英里 | m | 1609.344
| 公里 | m | 1000
| 里 | m | 500
| 公斤 | g | 1000
| 斤 | g | 500
| tonne 吨 | g | 1000000
t | ton | g | 1000000
| ton | ton | 1
lb lbs | pound 磅 | lb | 1
oz | ounce | lb | 0.0625
ha | hectare 公顷 | m^2 | 10000
| acre | acre | 1
| 亩 | 亩 | 1
gal | gallon | gal | 1
| quart | gal | 0.25
mph | | m/s | 0.44704
kmh kph kmph | | m/s | 5/18
rad | radian 弧度 | rad | 1
° | degree deg 度 | ° | 1
° | degree 度 | °C | 1
° | degree 度 | °F | 1
' | arcminute | ° | 1/60
" | arcsecond | ° | 1/3600
°C C °Celsius | celsius 摄氏度 | °C | 1
°F F °Fahrenheit | fahrenheit 华氏度 | °F | 1
K °K °Kelvin | kelvin | °K | 1
atm | atmosphere | atm | 1
| person people 人 | 人 | 1
$ USD US$ | dollar buck 美元 | USD | 1
€ EUR | euro 欧元 | EUR | 1
£ GBP | pound 英镑 | GBP | 1
¥ CNY RMB | yuan 元 块 人民币 | CNY | 1
¥ JPY | yen 日元 | JPY | 1
₹ INR Rs | rupee 卢比 | INR | 1
₩ KRW | won 韩元 | KRW | 1
¢ | cent penny pennie | USD | 0.01
| cent | EUR | 0.01
| penny pence pennie | GBP | 0.01
| 角 | CNY | 0.1
| dozen | dozen | 1
% pct | percent percentage | % | 1
| unit 单位 个 只 本 条 张 名 位 件 | | 1
"""
